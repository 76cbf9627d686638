"""From a model's config.json to the kernel definitions it needs, read off SGLang's own model.

    config.json --bootstrap (SGLang, meta device)--> reading --kernels--> kernel calls --definitions--> files
                `--formulas (config.json alone)-----------------------> the same kernel calls, or an error

Three interpreters take part: the driver (no torch), the extract environment (SGLang, `bootstrap`), and the torch
stack (`check`: every reference against its oracle before anything is written).
"""
