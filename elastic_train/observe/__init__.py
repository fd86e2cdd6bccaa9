"""What already happened: records, and their folds into ledger, status, goodput. Pure; others do the I/O."""
