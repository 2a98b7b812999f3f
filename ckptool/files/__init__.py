"""Files: byte sources, archives and their members, threads, and ``write``, the only package that writes."""
