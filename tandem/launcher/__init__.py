"""Services on this machine: settings, processes, embedded mode."""
