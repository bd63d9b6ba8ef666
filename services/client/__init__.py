"""The client SDK; its public names are re-exported by the package `mooncache` itself."""
