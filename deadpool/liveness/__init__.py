"""Detection: child exit, silence between hosts, progress of workers, self-test of spares."""
