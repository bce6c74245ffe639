"""A second op pair, which a test builds, installs and runs."""
