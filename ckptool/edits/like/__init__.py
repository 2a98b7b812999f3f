"""The match of a checkpoint with a model or another file, and the edit that makes it fit.

Names and shapes are compared with names and shapes; no tensor bytes are read.
"""
