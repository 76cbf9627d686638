"""The pipeline's stages, one function a rule: each reads files of the stage before and writes its own."""
