"""Journal records and their folds into ledger, status, metrics and goodput. Pure; others do the I/O."""
