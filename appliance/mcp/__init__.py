"""Tool servers of many groups behind one endpoint."""
