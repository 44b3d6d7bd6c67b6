"""Running and watching: jobs, monitor, logs, reports, trackers, runs, show, download, doctor."""
