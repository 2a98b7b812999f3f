"""The domain: what a pickle graph means to torch - tensors, storages, state dicts - and how it is edited."""
