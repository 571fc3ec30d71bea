"""`gdcomm bench transfer`: transfers between the host and one GPU, beside bare calls and other libraries.

`sections` names what is measured; `timing` measures, `report` shows. Neither MPI nor a GPU library is imported here.
"""
