namespace airside {}
