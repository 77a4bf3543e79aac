"""Commands that read runs and judge them."""
