"""Generated wire code; `make proto` writes it from runtime/proto."""
