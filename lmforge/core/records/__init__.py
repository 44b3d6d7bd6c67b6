"""What lies on a disk: run directories, their records, manifests of checkpoints and data."""
