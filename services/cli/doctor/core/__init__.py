"""The checks, one file for each group. They see facts only, so that each of their sentences can be tested."""
