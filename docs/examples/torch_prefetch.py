"""Training with a PyTorch DataLoader: batches are copied ahead of the loop, results behind it.

Run it: python torch_prefetch.py (needs a GPU, PyTorch and CuPy).
"""

import numpy as np
import torch
from torch.utils.data import DataLoader, TensorDataset

import gdcomm


def predictions(model, batches):
    for inputs, _ in batches:
        with torch.no_grad():
            result = model(inputs)
        yield result


def main():
    torch.manual_seed(0)
    inputs = torch.randn(4096, 32)
    targets = inputs @ torch.randn(32, 1)
    data = TensorDataset(inputs, targets)
    model = torch.nn.Linear(32, 1, bias=False).cuda()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    for _ in range(20):
        for x, y in gdcomm.prefetch(DataLoader(data, batch_size=256, shuffle=True)):  # CPU tensors in, CUDA tensors out
            optimizer.zero_grad()
            loss = torch.nn.functional.mse_loss(model(x), y)
            loss.backward()
            optimizer.step()  # meanwhile the next batches are copied
    assert loss.item() < 1e-3

    batches = gdcomm.prefetch(DataLoader(data, batch_size=256))
    results = list(gdcomm.offload(predictions(model, batches)))  # NumPy arrays; the GPU did not wait for the copies
    np.testing.assert_allclose(np.concatenate(results), targets.numpy(), atol=0.05)


if __name__ == "__main__":
    main()
