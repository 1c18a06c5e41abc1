"""Everything that knows a kube-proxy: finding one, draining it, and removing what it left."""
