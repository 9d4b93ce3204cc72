"""What a run is asked to stop by: signals, taken down and answered later; and what data workers do about them."""
