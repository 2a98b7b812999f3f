"""Recipes: the same weights for another layout, as rules of names and axes on two sides."""
