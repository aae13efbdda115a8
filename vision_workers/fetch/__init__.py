"""Pictures that are named by URL: from an allow-list of hosts, under limits of time and bytes."""
