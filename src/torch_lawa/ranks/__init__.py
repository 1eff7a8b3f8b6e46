"""Everything that makes processes synchronise, agree or split work, on `torch.distributed`."""
