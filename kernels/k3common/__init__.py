"""What the pairs of Kimi-K3's epilogues share: arithmetic, its model, positions, our kernels."""
