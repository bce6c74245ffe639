"""Long texts for the server layer: the manifest, fetching, cleaning, and cutting by tokens."""
