"""The radix tree, and which prefix owns which slots."""
