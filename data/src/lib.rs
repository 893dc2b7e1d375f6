//! The conversation-to-batch room.
