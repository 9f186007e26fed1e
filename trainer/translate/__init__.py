"""Configs of axolotl and TRL in our terms: tables of their keys, and the functions that translate them."""
