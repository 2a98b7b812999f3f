"""Replace objects that torch does not load by default with the nearest plain value.

A rule takes a ``Case`` and returns a ``Replacement``: the new node and its description. It returns None if it does not
apply, or ``UNKNOWN`` if no plain value can hold the object.
"""
