"""From a model's config.json to the kernel definitions that it needs, read off SGLang's own model.

 config.json --bootstrap (SGLang's model)--------> kernel calls --those that both have--> definitions --> files
    `--second (transformers' own model)-> the same calls, or its different ones

Three interpreters take part: the driver (no torch), the extract environment (SGLang, `bootstrap`), and the torch
environment (`check`: every reference against its oracle before anything is written).
"""
