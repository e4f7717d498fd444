"""Reports: tables and figures of the paper beside its numbers, as text, plots and one HTML page."""
