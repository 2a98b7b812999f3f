"""Per-rank files written with ``torch.save``, read together as one checkpoint."""
