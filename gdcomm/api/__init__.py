"""The methods of a Communicator, one file a family. Semantics of each are mpi4py's of the same name."""
