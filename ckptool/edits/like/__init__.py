"""What a checkpoint would load into: names and shapes against names and shapes, and the edit that makes them meet.

Two mappings of names and shapes come in, plain data goes out: no tensor bytes are read. Only ``targets`` opens files,
and builds the model that is named to it.
"""
