"""What people see of a run: its page, its report, its picture, its metrics as text. Only reads."""
