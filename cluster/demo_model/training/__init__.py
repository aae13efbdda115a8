"""How the demo model's trained part was made: pictures and questions, the tower, then the answers."""
