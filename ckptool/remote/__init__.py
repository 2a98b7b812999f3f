"""Checkpoints in object stores and on web servers. Nothing imports this room until an address is opened.

``store`` is the interface of a store, and the only place that turns failures into errors. ``obstores`` implements it
for S3, GCS, Azure and HTTP. ``source`` reads one object as a file, and ``folder`` is one listing as a folder.
"""
