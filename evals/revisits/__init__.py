"""Revisits: sessions over a store that go back to what they have seen, restart, come in another order, and fork.

`plan` has sizes, models and parts, `contents` what is visited and asked, `visits` the orders, `ways` the options of a
session by way, `served_visit` replays a visit, `baselines` counts what agents prefill without this library, `suite`
measures part by part, `rows` makes rows, `document` and `figures` write the page.
"""
