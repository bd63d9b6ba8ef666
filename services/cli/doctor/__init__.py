"""`mooncache doctor`: facts are gathered once, checks are pure functions of them, and a view shows what is wrong."""
