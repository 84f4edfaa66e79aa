"""Tools to test DeadPool and plugins with: oracle, small worlds to search exhaustively, simulator."""
