"""Whether a checkpoint would load into something, and the edit that makes it fit.

Names and shapes are compared with names and shapes; no tensor bytes are read.
"""
