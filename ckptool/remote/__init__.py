"""Checkpoints in object stores and on web servers. Nothing imports this room until an address is opened.

``store`` is the interface of a store, and the only place that turns failures into errors. ``s3`` and ``web``, which
also reads from the hub, implement it with requests of their own, ``libraries`` with those of others.
``source`` reads one object as a file, and ``folder`` is one listing as a folder.
"""
