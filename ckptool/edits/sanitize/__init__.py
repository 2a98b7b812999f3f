"""What an object that torch does not load by default becomes: the nearest plain thing, one module a family.

A rule takes a ``Case`` and gives the node to stand in its place, with a word for what it is now; or None, when it
has nothing to say; or ``UNKNOWN``, when it knows that nothing plain carries this.
"""
