"""Steps of the target: data in, data out (:class:`moa_server.engine.base.Engine`), its passes, caches and choices."""
