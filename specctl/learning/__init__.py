"""What every training needs: a folder of data that grows prompt by prompt, and a state to resume from."""
