"""Checkpoints that are whole and verified, or not there.

`config` what is asked for; `manifest` what a checkpoint says of itself; `folder` where they lie and when one
counts; `shards` which part of which tensor a rank writes; `shard_file` one rank's file, hashed as it is
written; `saver` a save, beside the training; `verify` whether every byte is as committed; `resume` where to
go on; `load` reading one onto any mesh.
"""
