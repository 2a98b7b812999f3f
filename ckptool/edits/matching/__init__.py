"""Match a checkpoint with a model or another file, and find the edit that makes it fit.

Names and shapes are compared, and a few rows of values where these leave doubt.
"""
