"""How long things take: device timing, and the benchmarks made of it."""
