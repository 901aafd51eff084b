"""The wire's messages: `longhaul.proto` and what `make proto` generates from it."""
