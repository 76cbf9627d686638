"""What runs inside the extract environment: SGLang's model on the meta device, written down as a reading.

`python -m traceproof.extract.bootstrap` is started by `traceproof.extract.reading`. Only here is SGLang imported.
One module per supported range of versions knows SGLang's internals (`sglang_0_5_22`); `facts` reads the modules of
the model that it built.
"""
