"""What a framework needs so that a survivor, or a promoted spare, goes on bit for bit after an abort."""
