"""Files: byte sources, archives and their members, threads, and the only package that writes (``write``)."""
