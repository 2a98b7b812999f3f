"""Replace objects that torch does not load by default by the nearest plain thing.

A rule takes a ``Case`` and returns the node to put in its place, with the words for it; None when it does not apply;
or ``UNKNOWN`` when nothing plain can hold the object.
"""
