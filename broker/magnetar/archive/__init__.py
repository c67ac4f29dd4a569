"""Archived ledgers: Parquet files with a manifest for each ledger, and a broker's way to read them.

    spark jobs and reads --> files <-- entries <-- process (a helper of the broker) <--socket-- reader <-- the broker's log

`files` has the layout, `entries` makes of rows the entries that the bookies had. Needs the extra `magnetar[archive]`, but
for `reader`, which the broker's process imports: a broker without pyarrow serves everything else.
"""
