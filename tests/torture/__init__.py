"""The long matrix: what ckptool promises when everything goes wrong. ``make torture`` runs it, pytest does not."""
